"""Where records come from: folders, tables, archives and the databases people already have."""
