"""Reports: one or more runs as a folder that one can read and pass on.

evidence (the runs and their summary) → figures (each defined once as a tidy dataframe with its meaning) → draw (PNG, SVG) and
charts (the page's interactive ones), which only draw it → page, markdown and CSV, which `write` puts on disk.
"""

from __future__ import annotations
