/** A graph cannot be run here. */
export class GraphError extends Error {}
