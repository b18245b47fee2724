"""Ways of training that are not one backward pass: layers that learn by themselves, and neurons added later."""
