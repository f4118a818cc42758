"""The heads that DEX extends, chosen by their scores on text."""
