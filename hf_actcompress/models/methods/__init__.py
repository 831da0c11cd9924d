"""How a model trains by a published method: gradients of chosen tokens, bits that are measured."""
