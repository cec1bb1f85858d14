"""Other engines than torch, and the packages they come in: vLLM, TensorRT-LLM, DALI, DeepSpeed."""
