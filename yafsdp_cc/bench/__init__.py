"""What training and its exchanges cost, beside torch's own, on the machine of whoever asks: ``yafsdp-cc bench``."""
