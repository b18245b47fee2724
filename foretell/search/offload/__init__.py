"""What leaves the device when not all of it fits: `search` decides, `words` says it, `plans` are plans with part of the model elsewhere."""
