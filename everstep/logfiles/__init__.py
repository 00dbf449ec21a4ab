"""Log files of any job: found, read quickly and within bounds, for ``everstep diagnose``.

``find`` says which files there are and whose they are, ``scan`` looks for signatures in raw bytes,
``reading`` keeps the lines that may matter, ``flight_files`` and ``error_files`` read what PyTorch
leaves beside logs, ``cache`` makes the second start quick. Nothing here judges: that is
``everstep.decide.diagnosis``.
"""
