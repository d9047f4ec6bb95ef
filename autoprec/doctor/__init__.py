"""What is wrong with a mixed-precision training: a short run watched, and each trouble with its layer.

with watch(model) as seen:
    train()                      # a few steps of your own loop
for finding in diagnose(seen):
    print(finding)
"""

from autoprec.doctor.diagnosis import diagnose, summarise
from autoprec.doctor.finding import Finding
from autoprec.doctor.observations import Observations
from autoprec.doctor.run import examine
from autoprec.doctor.watching import watch

__all__ = ["Finding", "Observations", "diagnose", "examine", "summarise", "watch"]
