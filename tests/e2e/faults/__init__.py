"""Every fault of ``docs/faults.md`` that needs neither a cut network nor minutes."""
