"""What each kind of subject can do: a class with the names that case files call it by, found where it lies."""
