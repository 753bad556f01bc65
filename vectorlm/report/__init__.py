"""What a run reports about itself: numbers per step, and their pictures."""
