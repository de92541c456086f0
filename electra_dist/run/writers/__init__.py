"""Writers of what a run records: metrics, TensorBoard, console and samples of text."""
