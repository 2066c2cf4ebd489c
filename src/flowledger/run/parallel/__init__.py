"""The mesh at work: processes and their groups, collectives, and the ways in which a model and a batch are cut."""
