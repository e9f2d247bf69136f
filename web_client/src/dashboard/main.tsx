/** The dashboard page: takes the viewer token, opens the session, renders what is known. */

import "../ui/base.css";
import "uplot/dist/uPlot.min.css";
import "./dashboard.css";
import { render } from "preact";
import { thisKind } from "../ui/kind";
import { allowedStorage } from "../ui/storage";
import { browserWorld, socketUrl, takeToken } from "./browser";
import { Session } from "./session";
import { App } from "./views/App";
import { TokenMissing } from "./views/Notice";

let session: Session | null = null;

function start(root: HTMLElement): void {
  session?.close();
  const storage = allowedStorage(() => sessionStorage);
  const token = takeToken(storage, location, (url) => history.replaceState(null, "", url));
  if (token === "") {
    if (thisKind() !== "") {
      location.replace("/join"); // who types the bare address into a phone wants to help
      return;
    }
    render(<TokenMissing />, root);
    return;
  }
  const opened = new Session(
    socketUrl(),
    token,
    (model) =>
      render(
        <App
          model={model}
          choose={(device) => opened.choose(device)}
          compare={(job) => opened.compare(job)}
          change={(change, job) => opened.change(change, job)}
          showLog={(job) => opened.showLog(job)}
        />,
        root,
      ),
    browserWorld(),
  );
  session = opened;
  opened.open();
}

const root = document.getElementById("dashboard");
if (root === null) throw new Error("index.html has no element #dashboard");
// Another token pasted into the address of an open page reloads nothing by itself.
addEventListener("hashchange", () => start(root));
start(root);
