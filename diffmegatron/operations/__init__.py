"""What an operator starts and looks at: jobs on a cluster, and how far they are."""
