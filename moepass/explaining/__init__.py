"""The report on a model and a machine: what is asked, what is found, and how it is shown."""
