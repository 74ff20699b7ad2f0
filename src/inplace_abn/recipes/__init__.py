"""Data, metrics and training runs built on the layers. Needs the ``train`` extra."""
