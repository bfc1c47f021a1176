from accel_fn.data.batch_plan import BatchPlan as BatchPlan
from accel_fn.data.batch_plan import plan_batches as plan_batches
from accel_fn.data.sample_seeds import SeededSamples as SeededSamples
from accel_fn.data.sample_seeds import sample_seed as sample_seed
from accel_fn.data.sample_seeds import seed_samples as seed_samples
