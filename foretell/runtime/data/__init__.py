"""What a run learns from: `samples` in an order of its own, `text` as bytes."""
