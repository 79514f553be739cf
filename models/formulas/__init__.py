"""Every formula of moepass for FLOPs, parameters, bytes and thresholds, in one place.

May import sizes.

    gemms             matrix multiplications: GEMM, batched, convolution
    attention         pairs of tokens in attention, and their cost
    layers            parameters and FLOPs of a layer and of a model
    memory            bytes at rest and in motion: banks, keys and values, activations, traffic
    stored_weights    bytes of weights in checkpoint formats
    communication     bytes that each strategy sends per device and layer
    saturation        the smallest number of tokens whose computation hides a transfer

Every size may be an int or a SymPy expression, such as a symbol of a captured graph. Integers yield integers,
expressions yield expressions.

Conventions: a multiplication and an addition are 2 FLOPs. FLOPs count GEMMs, attention scores and scans; elementwise
work costs bytes, not FLOPs. Bytes are counted once per tensor read or written.
"""
