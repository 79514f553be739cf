"""Every row goes through the activation function alone: followed node by node. May import local_form, graph."""
