"""A folder for PYTHONPATH with the module sitecustomize, which Python imports when it starts."""
