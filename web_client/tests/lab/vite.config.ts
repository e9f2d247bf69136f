import { resolve } from "node:path";
import { defineConfig } from "vite";

// The page with which tests and benchmarks try the kernels in a browser; it is not shipped.
export default defineConfig({
  root: import.meta.dirname,
  base: "./",
  build: {
    outDir: resolve(import.meta.dirname, "../../lab-dist"),
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  worker: { format: "es" },
});
