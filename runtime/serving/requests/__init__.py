"""What is asked of a model and what it answers, in tokens and numbers: plain records. Imports no other room."""
