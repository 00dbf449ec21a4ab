"""Log diagnosis: from what ranks have written and how they ended to one verdict.

``types`` has the input and the output, ``catalogue`` finds signatures in lines, ``verdict`` judges
a whole job, ``tail`` the end of one rank's log. Pure: catalogues are loaded by
``everstep.spec.log_catalogue`` and files are read by ``everstep.logfiles``.
"""
