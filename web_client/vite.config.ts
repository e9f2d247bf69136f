import { resolve } from "node:path";
import { defineConfig } from "vite";

// The pages go where the Python package looks for them; git ignores that folder.
export default defineConfig({
  base: "./",
  build: {
    outDir: resolve(import.meta.dirname, "../cleave/server/web"),
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      input: {
        dashboard: resolve(import.meta.dirname, "index.html"),
        join: resolve(import.meta.dirname, "join.html"),
      },
    },
  },
  worker: { format: "es" },
});
