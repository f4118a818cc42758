"""What each start of a job leaves, and the decision after it: requeue the job, or end it."""
