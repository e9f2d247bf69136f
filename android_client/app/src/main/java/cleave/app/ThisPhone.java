package cleave.app;

import android.app.ActivityManager;
import android.content.Context;
import android.content.pm.PackageManager;
import android.os.Build;
import cleave.core.DeviceDescription;
import cleave.core.graphs.OpenGraph;
import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.KernelFactory;
import cleave.core.policy.Policy;
import cleave.core.profile.Phone;
import cleave.gpu.GpuKernel;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;

/** What the phone is, and what of it the owner lends. */
final class ThisPhone {
    private static final int ANDROID_12 = 31;
    private static final int TABLET_DP = 600;

    private final Context context;
    private final Policy policy;

    ThisPhone(Context context, Policy policy) {
        this.context = context;
        this.policy = policy;
    }

    static int cores() {
        return Runtime.getRuntime().availableProcessors();
    }

    /** What an app may use at most; of that the owner lends a share. */
    static long appMemoryBytes() {
        return Runtime.getRuntime().maxMemory();
    }

    /** The version of this app. */
    static String version(Context context) {
        try {
            return context.getPackageManager()
                    .getPackageInfo(context.getPackageName(), 0)
                    .versionName;
        } catch (PackageManager.NameNotFoundException error) {
            throw new IllegalStateException("an app that runs is not installed", error);
        }
    }

    List<KernelFactory> kernels() {
        int threads = policy.threads(cores());
        return Arrays.asList(CpuKernel.factory(threads, ThisPhone::thread), GpuKernel.factory());
    }

    /** What runs graphs; null where nothing does. */
    OpenGraph graphs() {
        return OnnxRuntime.graphs(policy.threads(cores()));
    }

    /** For the server. */
    DeviceDescription description() {
        String kind = isTablet() ? "tablet" : "phone";
        return new DeviceDescription(title(), policy.memoryBytes(appMemoryBytes()), "", kind);
    }

    /** For a profile. */
    Phone phone() {
        ActivityManager.MemoryInfo memory = new ActivityManager.MemoryInfo();
        context.getSystemService(ActivityManager.class).getMemoryInfo(memory);
        return new Phone(
                title(),
                isTablet(),
                processor(),
                cores(),
                policy.threads(cores()),
                "Android " + Build.VERSION.RELEASE,
                policy.memoryBytes(appMemoryBytes()),
                memory.totalMem);
    }

    /** A thread that lets everything else go first, and ends with the app. */
    static Thread thread(Runnable work) {
        Thread thread = new Thread(work, "multiply");
        thread.setDaemon(true);
        thread.setPriority(Thread.MIN_PRIORITY);
        return thread;
    }

    private boolean isTablet() {
        return context.getResources().getConfiguration().smallestScreenWidthDp >= TABLET_DP;
    }

    private static String title() {
        String maker = Build.MANUFACTURER;
        String model = Build.MODEL.toLowerCase(Locale.ROOT);
        boolean twice = model.startsWith(maker.toLowerCase(Locale.ROOT));
        return twice ? Build.MODEL : maker + " " + Build.MODEL;
    }

    private static String processor() {
        return Build.VERSION.SDK_INT < ANDROID_12
                ? Build.HARDWARE
                : Build.SOC_MANUFACTURER + " " + Build.SOC_MODEL;
    }
}
