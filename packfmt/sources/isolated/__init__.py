"""File formats whose parsers are C libraries are read in a child process: a hostile file then costs an error only."""
