"""What a request must be before it reaches a scheduler."""
