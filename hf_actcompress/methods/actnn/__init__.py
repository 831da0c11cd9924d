"""ActNN, arXiv 2104.14129: integers that give the samples with the widest ranges more bits.

Keeps: codes of 2 bits on average, and one range per group. Gradient: approximate; without bias where rounding is
stochastic and no signs are kept. Ask for it by the preset "actnn" or the codec "int2_ranked".
"""
