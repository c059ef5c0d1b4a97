"""What the trainers of all suites share: the loop, its log, its checkpoint directory, its end."""
