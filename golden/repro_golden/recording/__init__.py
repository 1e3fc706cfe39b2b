"""What looks at a training run from inside its process, and writes its steps."""
