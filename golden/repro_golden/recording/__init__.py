"""What looks at a training run from inside its process, and writes its steps. No value of the program changes."""
