"""What a probe times: pieces of PyTorch with sizes drawn at random, by family of ops; `steps` are whole reference steps."""
