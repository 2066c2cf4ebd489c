"""What did happen: the recorder, attached from outside."""
