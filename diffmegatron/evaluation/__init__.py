"""Evaluation of trained models: benchmark suites, the runner of suites, and its reports."""
