"""Data: from text to the batches of each optimizer step."""
