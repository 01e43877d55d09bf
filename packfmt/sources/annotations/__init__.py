"""Detection sets: COCO, Pascal VOC and YOLO annotations beside a folder of images."""
