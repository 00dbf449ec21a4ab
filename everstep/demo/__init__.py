"""``everstep demo``: a real training job, broken again and again, beside one that nobody touches.

``run`` is the play, ``faults`` the list of what is broken and what has to follow, ``stage`` the
hands and eyes that break and look, ``baseline`` the job that nobody touches, ``side_jobs`` the
faults that end a job, ``report`` what a person and a program read at the end.
"""
