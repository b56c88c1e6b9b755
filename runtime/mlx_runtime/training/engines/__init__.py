"""How the workers of a run are started: in this process, as processes on this machine, or by Ray.

in_process   no workers: training runs inside the driver, where a debugger works
local        workers forked from the driver, with torchrun's environment and Ray Train's functions
on_ray       workers placed by Ray Train, on a cluster or on a Ray embedded in the driver
"""
