"""The report on a model and a machine: what is found, and how it is shown. Imports no other room."""
