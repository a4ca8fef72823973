"""What is learned: the protocol that the training loop knows, and its implementations."""
