"""Running a model on a GPU: the only part of the engine that speaks to CUDA."""
