"""A folder for PYTHONPATH, whose module sitecustomize Python imports at its start."""
