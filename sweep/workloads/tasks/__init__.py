"""Tasks of GRPO."""
