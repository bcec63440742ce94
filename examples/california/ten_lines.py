"""The California demo from Python, in about ten lines; run demo.py first, it writes train.csv and queries.csv."""

import certify
import models
import privacy

graph = models.read("examples/california/model.onnx")
recipe = certify.load_recipe("examples/california/recipe.toml")
records = certify.read_table("out/california/train.csv", target="MedHouseVal")
envelope = certify.run(graph, recipe, records.features, records.targets, radii=range(9), backend="relational")
certify.write_envelope("out/california/ten_lines.envelope.safetensors", envelope)  # private data

queries = certify.read_table("out/california/queries.csv").features  # public inputs
release = privacy.predict(envelope, graph, queries, epsilon=1.0, per_query=True)
print(release.values[:, 0], release.guarantee)
