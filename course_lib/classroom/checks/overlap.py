"""The exercises of "Overlap": send gradients inside backward; choose the buckets' sizes."""

from .exercise import Exercise
from .overlap_hooks import grade_hooks
from .overlap_sizes import grade_bucket_sizes

EXERCISES = (
    Exercise(
        name="overlap/1",
        title="send each layer inside backward",
        difficulty=3,
        minutes=20,
        hints=(
            "Which function of a parameter runs as soon as its .grad is set? A layer has several "
            "parameters: when is the layer complete?",
            "`parameter.register_post_accumulate_grad_hook(hook)` calls hook(parameter). Let the "
            "hook count down the gradients that its layer still misses. At zero, call "
            "launch(index) and keep the handle. Do not wait there.",
            "finish waits for all handles, in order. Then it empties the list of handles and sets "
            "each count back to len(layer), since the hooks stay for the next step.",
        ),
        solution="course_lib.classroom.checks.overlap_hooks:send_in_backward",
        grade=grade_hooks,
    ),
    Exercise(
        name="overlap/2",
        title="choose the bucket sizes",
        difficulty=2,
        minutes=15,
        hints=(
            "You need no formula: `exposed_s` judges any pair of sizes. What is the smallest size "
            "that makes sense, and what is the largest?",
            "Try sizes from the smallest gradient to the sum of all. Steps by a factor are better "
            "than equal steps, since sizes range over decades.",
            "Two loops, one over the first bucket's size and one over the others'. Keep the pair "
            "for which exposed_s is least. Factors of 1.2 are fine enough.",
        ),
        solution="course_lib.classroom.checks.overlap_sizes:choose_bucket_sizes",
        grade=grade_bucket_sizes,
    ),
)
