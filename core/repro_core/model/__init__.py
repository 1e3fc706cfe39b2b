"""The policy and the critic in plain torch, and Hugging Face's files of them."""
