"""What lets SGLang's own server start on a machine without a GPU. Nothing here is imported on a GPU machine."""
