"""Mesa, arXiv 2111.11124: integers of 8 bits whose ranges are means over the last steps.

Keeps: 8 bits per element, and one range per group of features for the whole tensor. Gradient: approximate; without bias
inside of the ranges where no signs are kept. Ask for it by the preset "mesa" or the codec "int8_running".
"""
