"""The pages of docs/reference, which are generated from the code that they describe."""
