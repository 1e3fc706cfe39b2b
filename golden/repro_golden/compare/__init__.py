"""Two traces: where they first differ, by how much, and what is no difference. Runs nothing."""
