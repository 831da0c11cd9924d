"""What is held between steps: weights, gradients and the optimizer's states, whole or split by ZeRO."""
